SELECT p.id,
       sum(b.quantity) - sum(s.quantity) AS quantity,
       (sum(b.quantity) - sum(s.quantity)) * avg(b.price) AS value,
       sum(s.quantity * s.price) - sum(s.quantity) * avg(b.price) AS profit
FROM products p
JOIN purchases b ON b.product = p.id
JOIN sales s ON s.product = p.id
GROUP BY p.id
