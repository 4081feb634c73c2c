"""Lazy logits: what a head returns in place of its product, until a loss is computed from them in
chunks of rows, or something asks for the logits.

    logits      the tensor, which sees each function that is called with it
    call        the head's call, whose product waits
    pending     what follows from it by operations on its rows
    operations  under which it stays so
    losses      what is computed without the logits
    gradients   what is said where a gradient of the logits is asked for
"""
