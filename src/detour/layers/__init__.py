"""The parts models are made of. Knows ops and weights; knows no model and no flag."""
