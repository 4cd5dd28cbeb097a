"""Rules of admission that the simulator and the scheduler inside SGLang share.

The dual scanner's budgets for each side, and the forecast of the KV that running
requests will need.
"""
