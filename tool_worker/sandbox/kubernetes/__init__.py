"""The sandbox `kubernetes`: a pod for each workspace, and the command line that starts pods and runs programs in them.

Start with: pods.
"""
