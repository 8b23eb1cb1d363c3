"""A run as one page: a self-contained HTML file that needs nothing but a browser.

series      the curve: which steps count, what was undone, thinned so that a million steps fit
account     where the time went, in parts that add up
page        ledger, series and account as HTML
assets/     the page's template, style and script; inlined when it is made
"""
