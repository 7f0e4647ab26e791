"""The pre-training corpus: from raw text to exact, resumable, proportional batches.

Text is cut into segments of at most `seq_length` tokens, written to files that are read through a
memory map, and drawn in fixed proportions of their types. Imports no other room.
"""
