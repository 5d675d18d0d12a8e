CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer INTEGER NOT NULL REFERENCES customers (id),
    placed TEXT NOT NULL, -- 2026-03-09 17:20:00
    status TEXT           -- cancelled, or sent, or NULL as long as it is new
);
CREATE TABLE items (order_id INTEGER NOT NULL REFERENCES orders (id), price INTEGER NOT NULL, quantity INTEGER NOT NULL);
CREATE TABLE payments (order_id INTEGER NOT NULL REFERENCES orders (id), cents INTEGER NOT NULL);
