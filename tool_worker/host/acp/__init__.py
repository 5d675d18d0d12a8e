"""An ACP agent in its workspace's sandbox: its process, the client side of the protocol, its reports.

Standard library only. Start with: acp_program.
"""
