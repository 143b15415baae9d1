"""What a weight is quantised to: schemes, the tensors of a quantised weight, and rounding to nearest."""
