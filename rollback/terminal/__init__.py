"""What commands share of text, files and terminals."""
