"""Reports that people read: one HTML file each, which asks the network for nothing and runs only our own script.

What a page says is collected by entries.py (the papers' figures) and runs.py (runs and comparisons), curves are drawn
by chart.py, and page.py fills in the templates, in which every text is escaped.
"""
