"""`rollback doctor`: can this machine keep the promises? Measures, and judges what it has measured.

Whatever is written to be measured is removed again. Judgements are pure functions of what was measured.
"""
