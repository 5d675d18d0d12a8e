"""The controller worker decides: it folds a conversation's log into its state and asks a model for the next step.

The only package that calls a model. It never touches a workspace and never imports the tool worker: both communicate by
events only.
"""
