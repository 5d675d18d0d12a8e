-- Marks: the deaths of workers that count against a conversation, see crash_attribution.py. Tool workers only read them, so
-- one that was taken over neither makes a dead letter of a conversation by writing marks nor acquits one.
-- Keys:  conversation base  :grants  hash  crashes -> deaths that count   late -> those of them after a wait for others
--                                          mark -> '1' or '3': a step runs, see `mark` in ownership.lua
--        A user with the rights of an earlier version may not reach them there; then they are fields of :meta.

local store = require('store/prelude')
local marks = {}

function marks.key_of(base)
  local grants = base .. ':grants'
  return store.may('HSET', grants, 'crashes', '') and grants or base .. ':meta'
end

-- Whether the caller may count deaths. Where it can only read them, it leaves that to another worker.
function marks.may_count(shard)
  local grants = shard .. ':c:any:grants'
  return store.may('HSET', grants, 'crashes', '') or not store.may('HGET', grants, 'crashes')
end

function marks.clear(base)
  redis.call('HDEL', marks.key_of(base), 'crashes', 'late', 'mark')
end

-- Count the death of the owner: the first in any case, later ones only during a step. Returns the deaths that count.
function marks.count(base)
  local key = marks.key_of(base)
  local found = redis.call('HMGET', key, 'crashes', 'mark', 'late')
  local crashes, mark = store.number_of(found[1]) or 0, found[2]
  if crashes == 0 or mark then crashes = crashes + 1 end
  if mark == '3' then redis.call('HSET', key, 'late', (store.number_of(found[3]) or 0) + 1) end
  redis.call('HSET', key, 'crashes', crashes)
  return crashes
end

-- Note what the owner does, see `mark` in ownership.lua.
function marks.note(base, what)
  local key = marks.key_of(base)
  if what == '1' or what == '3' then redis.call('HSET', key, 'mark', what)
  else redis.call('HDEL', key, 'mark') end
  local late = what == '2' and store.get(key, 'late')
  if late then redis.call('HSET', key, 'crashes', late) elseif what == '2' then redis.call('HDEL', key, 'crashes') end
end

-- Another worker is the owner now, which does nothing yet. Returns the deaths that count.
function marks.take_over(base)
  local key = marks.key_of(base)
  redis.call('HDEL', key, 'mark')
  return store.number_of(store.get(key, 'crashes')) or 0
end

return marks
