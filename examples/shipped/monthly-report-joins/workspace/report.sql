SELECT c.name, strftime('%Y-%m', o.placed) AS month,
       count(*) AS orders,
       sum(i.price * i.quantity) AS ordered,
       sum(p.cents) AS paid,
       sum(i.price * i.quantity) - sum(p.cents) AS open
FROM customers c
JOIN orders o ON o.customer = c.id
JOIN items i ON i.order_id = o.id
JOIN payments p ON p.order_id = o.id
WHERE o.placed BETWEEN :year || '-01-01' AND :year || '-12-31'
  AND o.status <> 'cancelled'
GROUP BY c.name, month
ORDER BY c.name, month
