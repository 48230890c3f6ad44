"""One thread a process, and what is no test of kltest's own.

The worlds are small: threads cost more than they gain, most of all where several processes test at once. The example
project is tried as its own user would, by test_doors_example.py.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
collect_ignore = ["example_project"]
