"""The core of the scan on the symbolic evaluator: from files to the terms of a tree and their programs."""
