"""A run as one page: a self-contained HTML file that needs nothing but a browser."""
