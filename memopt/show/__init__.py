"""How reports are shown: tables, drawings and pages, for anatomy, plan, convert and the demo.

sections   tables, and how they are written as text
shown      the base of reports: text, notebooks, rich
page       a report as one HTML page
figure     a figure by matplotlib
axes       axes of a drawing in SVG
timeline   the bytes of a step over its operators, as SVG
"""
