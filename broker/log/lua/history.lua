-- History: whether the log still has what a caller remembers. A store may have lost its tail.
-- Keys:  conversation base  :events  stream  id '<n>-0', one field e: checksum and bytes of the event

local history = {}

-- The outcome of an append that an earlier call has made, from '<first>:<last>'.
function history.duplicate(range)
  local first, last = string.match(range, '(%d+):(%d+)')
  return {'duplicate', tonumber(first), tonumber(last)}
end

-- The checksum of an event, eight hex digits; nil: the log has no such event.
function history.checksum_of(base, id)
  local found = redis.call('XRANGE', base .. ':events', id .. '-0', id .. '-0')
  return #found == 1 and string.format('%02x%02x%02x%02x', string.byte(found[1][2][2], 3, 6)) or nil
end

-- Whether the log still has an event as a caller remembers it: by its id and its checksum ('' or nil: unchecked). A store
-- that lost its tail gives the numbers of lost events to others.
function history.remembers(base, id, checksum)
  return not checksum or checksum == '' or history.checksum_of(base, id) == checksum
end

return history
