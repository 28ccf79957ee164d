"""Audits: a sample of the accepted drafted steps is judged again, and what was accepted wrongly is counted."""
