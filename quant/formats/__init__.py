"""One file per checkpoint format: names and bytes to `WeightTensor`."""
