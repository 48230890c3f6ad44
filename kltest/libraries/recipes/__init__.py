"""Ways to make a library follow ∇KL(π‖ref) of whole sequences, on- and off-policy: one file a library, to be copied.

None of them needs kltest; each is graded through its library's door like any other setting.
"""
