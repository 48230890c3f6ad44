"""`kltest init`: losses of a checkout with what is declared of them, and the files that hold them in CI."""
