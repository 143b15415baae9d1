"""What a swapped piece does, in terms of ops.

Every replacement is made by a factory named in a rule: ``factory(original, counter, **parameters)``
returns the function that takes the original's place, counts each call it serves, and hands a call it
does not serve back to the original, with the reason.
"""
