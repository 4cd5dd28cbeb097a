"""A step-by-step simulator of the engine, to predict the run time of an order.

``simulator`` is the entry point and ``step_loop`` the loop. The other modules are the
parts of a step, which change the records of ``engine_state`` in place.
"""
