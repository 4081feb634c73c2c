"""How reports are shown: tables, drawings and pages, for anatomy and plan alike.

sections   tables as text, as wide as the terminal
page       a report as one HTML page
axes       axes of a drawing in SVG
timeline   the bytes of a step over its operators, as SVG
"""
