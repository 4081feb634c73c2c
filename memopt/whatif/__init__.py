"""Courses that a step might take: other fates of its activations, and what would help.

fates    what becomes of the activations, on a copy of the model; and the step's memory then
away     a real step whose activations leave the device
advice   changes to a step, each predicted
"""
