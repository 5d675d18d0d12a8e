WITH amounts AS (
    SELECT o.customer,
           strftime('%Y-%m', o.placed) AS month,
           (SELECT coalesce(sum(price * quantity), 0) FROM items WHERE order_id = o.id) AS ordered,
           (SELECT coalesce(sum(cents), 0) FROM payments WHERE order_id = o.id) AS paid
    FROM orders o
    WHERE strftime('%Y', o.placed) = :year
      AND coalesce(o.status, '') <> 'cancelled'
)
SELECT c.name, a.month,
       count(a.customer) AS orders,
       coalesce(sum(a.ordered), 0) AS ordered,
       coalesce(sum(a.paid), 0) AS paid,
       coalesce(sum(a.ordered - a.paid), 0) AS open
FROM customers c
LEFT JOIN amounts a ON a.customer = c.id
GROUP BY c.id, a.month
ORDER BY c.name, c.id, a.month
