"""Local time by the European rule."""

from datetime import date, datetime, timedelta, timezone

EPOCH = date(1970, 1, 1)


def change(year, month):
    """Return the moment at which the clocks change in a month of 31 days."""
    last = date(year, month, 31)
    sunday = last - timedelta(days=last.isoweekday() % 7)
    return (sunday - EPOCH).days * 86400 + 3600


class Zone:
    def __init__(self, offset, summer=True):
        """Offset is the standard one, in seconds east of UTC."""
        self.standard = offset
        self.summer = summer

    def offset(self, seconds):
        """Return the offset at a moment."""
        year = datetime.fromtimestamp(seconds, timezone.utc).year
        if self.summer and change(year, 3) <= seconds < change(year, 10):
            return self.standard + 3600
        return self.standard

    def local_date(self, seconds):
        """Return the local date at a moment."""
        return EPOCH + timedelta(days=(seconds + self.offset(seconds)) // 86400)

    def to_utc(self, year, month, day, minutes):
        """Return the moment of a local time."""
        local = (date(year, month, day) - EPOCH).days * 86400 + minutes * 60
        early, late = local - self.standard - 3600, local - self.standard
        if self.summer and early + self.offset(early) == local:
            return early
        if late + self.offset(late) == local:
            return late
        return change(year, 3)
