"""How reports are shown: tables, drawings and pages, for anatomy, plan, convert and the demo.

sections   tables, and how they are written as text
shown      the base of reports: text, notebooks, rich
page       a report as one HTML page
figure     a figure by matplotlib
axes       axes of a drawing in SVG
labels     places for the names of points, none over another
timeline   the bytes of a step over its operators, as a drawing in a page
script     zoom, pan, and the tensor under the pointer
"""
