"""The order of the fields of each row of a table whose prompts list them.

The prompts of a table form a prefix tree. Each of its edges is one value of one field,
and its weight is computed once for all rows below it. Rows may list their fields in
different orders, so an order of fields is found for each row such that the tree is
light. Read ``field_table`` for the input, then ``field_orders``, which splits the rows
into groups from the root down, as ``value_splits`` finds them, and carries the orders over
to rows that come later.
"""
