-- History: check whether the log still holds an event that a caller remembers. A store may have lost its tail.
-- Keys:  conversation base  :events  stream  id '<n>-0', one field e: checksum and bytes of the event

local history = {}

-- The reply for an append that an earlier call has made, from '<first>:<last>'.
function history.duplicate(range)
  local first, last = string.match(range, '(%d+):(%d+)')
  return {'duplicate', tonumber(first), tonumber(last)}
end

-- The checksum of an event, eight hex digits; nil if the log has no such event.
function history.checksum_of(base, id)
  local found = redis.call('XRANGE', base .. ':events', id .. '-0', id .. '-0')
  return #found == 1 and string.format('%02x%02x%02x%02x', string.byte(found[1][2][2], 3, 6)) or nil
end

-- Whether the log still holds an event with this id and checksum ('' or nil to skip the check). A store that lost its tail
-- assigns the ids of lost events again.
function history.remembers(base, id, checksum)
  return not checksum or checksum == '' or history.checksum_of(base, id) == checksum
end

return history
