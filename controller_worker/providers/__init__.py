"""Model providers behind one protocol: configuration, wires, backends, prices, errors.

Start with: llm.
"""
