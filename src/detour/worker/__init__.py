"""Running a plan on a device. Knows models and tensors; knows no request, no string, no socket."""
