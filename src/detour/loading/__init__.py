"""Files to tensors. Knows formats and packings; knows no model."""
