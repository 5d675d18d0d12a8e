"""Amounts of money as whole cents."""

CURRENCY_SIGNS = "$€£"


def parse_cents(text: str) -> int:
    """Read an amount such as `1,234.50`, `€ 7` or, for a refund, `(12.30)`."""
    amount = text.strip()
    is_refund = amount.startswith("(") and amount.endswith(")")
    if is_refund:
        amount = amount[1:-1]
    amount = amount.strip(CURRENCY_SIGNS + " ").replace(",", "")
    cents = int(float(amount) * 100)
    return -cents if is_refund else cents


def format_cents(cents: int) -> str:
    """Write cents as `1,234.50`."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100:,}.{abs(cents) % 100:02}"
