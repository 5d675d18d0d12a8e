WITH sold AS (
    SELECT product, sum(quantity) AS quantity, sum(quantity * price) AS revenue
    FROM sales
    GROUP BY product
),
ordered AS (
    SELECT product, quantity, price,
           sum(quantity) OVER up AS until,
           row_number() OVER (PARTITION BY product ORDER BY day DESC, id DESC) AS from_last
    FROM purchases
    WHERE cancelled = 0
    WINDOW up AS (PARTITION BY product ORDER BY day, id ROWS UNBOUNDED PRECEDING)
),
-- of each purchase, the units that were sold
used AS (
    SELECT o.product, o.quantity, o.price, o.from_last,
           max(0, min(o.quantity, coalesce(s.quantity, 0) - (o.until - o.quantity))) AS gone
    FROM ordered o
    LEFT JOIN sold s ON s.product = o.product
),
totals AS (
    SELECT product,
           sum(quantity) AS bought,
           sum((quantity - gone) * price) AS value,
           sum(gone * price) AS cost,
           max(CASE WHEN from_last = 1 THEN price END) AS last_price
    FROM used
    GROUP BY product
)
SELECT p.id,
       coalesce(t.bought, 0) - coalesce(s.quantity, 0) AS quantity,
       coalesce(t.value, 0) AS value,
       coalesce(s.revenue, 0) - coalesce(t.cost, 0)
           - max(0, coalesce(s.quantity, 0) - coalesce(t.bought, 0)) * coalesce(t.last_price, 0) AS profit
FROM products p
LEFT JOIN totals t ON t.product = p.id
LEFT JOIN sold s ON s.product = p.id
ORDER BY p.id
