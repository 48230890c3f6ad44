"""What is no test of kltest's own: the example project is tried as its own user would, by test_doors_example.py."""

collect_ignore = ["example_project"]
