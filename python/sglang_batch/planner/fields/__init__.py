"""The order of the fields of each row of a table whose prompts list them.

The prompts of a table form a prefix tree. Each of its edges is one value of one field,
and what it weighs is computed once for all rows below it. Rows may list their fields in
different orders, so an order of fields is found for each row such that the tree is
light. Read ``field_table`` for the input, then ``field_orders``, which splits the rows
into groups from the root down: few rows by ``best_splits``, more by ``merged_splits``
or ``value_splits``. ``order_tree`` carries the orders over to rows that come later.
"""
