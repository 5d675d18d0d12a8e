"""Local time by the European rule."""

from datetime import date, datetime, timedelta, timezone

EPOCH = date(1970, 1, 1)


class Zone:
    def __init__(self, offset, summer=True):
        """Offset is the standard one, in seconds east of UTC."""
        self.standard = offset
        self.summer = summer

    def offset(self, seconds):
        """Return the offset at a moment."""
        day = datetime.fromtimestamp(seconds + self.standard, timezone.utc).date()
        if self.summer and date(day.year, 3, 31) <= day < date(day.year, 10, 31):
            return self.standard + 3600
        return self.standard

    def local_date(self, seconds):
        """Return the local date at a moment."""
        return EPOCH + timedelta(seconds=seconds + self.offset(seconds))

    def to_utc(self, year, month, day, minutes):
        """Return the moment of a local time."""
        local = (date(year, month, day) - EPOCH).days * 86400 + minutes * 60
        return local - self.offset(local)
