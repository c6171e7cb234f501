"""What runs next. Knows tokens, pages and steps; knows no model, no string and no tensor library."""
