"""Code that is read and not run: an evaluator of Python's syntax whose values are nodes of a graph.

`evaluate` follows assignments, calls, branches, loops, objects and closures of a source tree; what it computes is a
graph of operations over what it could not know (parameters, fields, results of unknown calls). `computed` evaluates
such a graph in torch once its inputs are given, and `written` says it as a program and as a
formula. Nothing of the tree is imported or executed.
"""
