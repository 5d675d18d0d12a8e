-- Turns: who is next where more waits than is taken up. The first part of the library `deckhands`.
--
-- A stream holds as many undelivered entries as are taken up soon, its window. What comes while the window is full lines
-- up, and gets into the stream in its turn, whenever an entry is taken up and with each beat. While nothing lines up,
-- nothing is ordered, and an entry costs one or two reads more.
--   shard base  deck:{k}   :turns:<stream>                  hash  picks -> how many turns there were
--                          :turns:<stream>:<class>          zset  who waits -> place, the lowest is next
--                          :turns:<stream>:<class>:shares   hash  tenant -> its next place, ':at' -> the latest one taken
--                          :tenants   hash  tenant, or '*' for all that are not named -> '<weight> <most open> <most a minute>'
-- Classes are '0' interactive, '1' normal, '2' batch. The first goes first, but each eighth turn is the last one's and
-- another eighth the middle one's, so none starves. Within a class a tenant's places are 1/weight apart (start-time fair
-- queueing), so tenants share by weight while they wait and owe nothing afterwards.

local WINDOW = 8
local MAX_TURNS = 64
local MAX_STEPPING_BACK = 8
local TURN_OF_POOLS = 2  -- modulo 8: the turn of a node at which the first in a pool's line goes, of any tenant
local WAITING = 'turn'  -- what stands for an entry's id while it lines up
local USUAL_ORDER = {'0', '1', '2'}
local ORDERS = {[0] = {'2', '1', '0'}, [4] = {'1', '0', '2'}}  -- by the number of the turn, modulo 8

-- What the server says of a consumer group; nil when there is none.
local function group_of(shard, stream, name)
  if not is_there(shard, stream, 'stream') then return nil end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = pairs_of(flat)
    if group['name'] == name then return group end
  end
  return nil
end

local function turns_of(shard, stream)
  return shard .. ':turns' .. string.sub(stream, #shard + 1)
end

-- The share of a tenant: under which name it stands in line, its weight, its bounds; 0: no bound.
local function share_of(shard, tenant)
  local named, others = unpack(redis.call('HMGET', shard .. ':tenants', tenant, '*'))
  local weight, open, pace = string.match(named or others or '', '^(%S+) (%S+) (%S+)$')
  weight = number_of(weight)
  if not weight or weight < 0.001 or weight > 1000 then weight = 1 end
  return (named or not others) and tenant or '*', weight, number_of(open) or 0, number_of(pace) or 0
end

local function window_of(shard)
  return math.max(WINDOW, 2 * redis.call('ZCARD', shard .. ':workers'))
end

-- How much of the window of a stream is free: how many more entries than nobody has been handed yet may be in it.
local function room_in(shard, stream, group)
  local window, found = window_of(shard), group_of(shard, stream, group)
  if not found then return window - redis.call('XLEN', stream) end
  local waiting = found['lag']  -- the server does not always know it
  if not waiting then
    waiting = #redis.call('XRANGE', stream, '(' .. found['last-delivered-id'], '+', 'COUNT', window)
  end
  return window - waiting
end

local function has_waiting(turns)
  return redis.call('EXISTS', turns .. ':0', turns .. ':1', turns .. ':2') > 0
end

local function is_in_line(shard, stream, member)
  local turns = turns_of(shard, stream)
  for _, class in ipairs(USUAL_ORDER) do
    local queue = turns .. ':' .. class
    if is_there(shard, queue, 'zset') and redis.call('ZSCORE', queue, member) then return true end
  end
  return false
end

-- Line up for a stream if there is a line, or no room. Returns whether it did; the caller notes that, and then pumps.
local function line_up(shard, stream, group, member, class, tenant)
  if redis.call('XLEN', stream) < WINDOW then return false end
  local turns = turns_of(shard, stream)
  if not has_waiting(turns) and room_in(shard, stream, group) > 0 then return false end
  if class ~= '0' and class ~= '2' then class = '1' end
  local queue, shares = turns .. ':' .. class, turns .. ':' .. class .. ':shares'
  -- One that stands there already, because it is notified once more, keeps its place and pays for no second one.
  if is_there(shard, queue, 'zset') and redis.call('ZSCORE', queue, member) then return true end
  is_there(shard, shares, 'hash')
  local name, weight = share_of(shard, tenant or '')
  local found = redis.call('HMGET', shares, ':at', name)
  local place = math.max(number_of(found[1]) or 0, number_of(found[2]) or 0)
  redis.call('HSET', shares, name, string.format('%.6f', place + 1 / weight))
  trim_shares(shares, number_of(found[1]) or 0)
  redis.call('ZADD', queue, string.format('%.6f', place), member)
  return true
end

-- Returns who is first in a class; or nil, and whether somebody is who may not go now. One whose tenant is ahead steps
-- back by as much, so that it keeps no other tenant from going.
local function first_in_line(shard, turns, class, may_go)
  local queue, shares = turns .. ':' .. class, turns .. ':' .. class .. ':shares'
  if not is_there(shard, queue, 'zset') then return nil end
  is_there(shard, shares, 'hash')
  local found
  for _ = 1, MAX_STEPPING_BACK do
    found = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')
    local goes, ahead = true, nil
    if may_go then goes, ahead = may_go(class, found[1]) end
    if goes then break end
    if not ahead or redis.call('ZCARD', queue) == 1 then return nil, true end
    redis.call('ZADD', queue, string.format('%.6f', found[2] + ahead), found[1])
    found = nil
  end
  if not found then return nil, true end
  redis.call('ZREM', queue, found[1])
  if redis.call('ZCARD', queue) == 0 then redis.call('DEL', shares)
  else redis.call('HSET', shares, ':at', found[2]) end
  return found[1]
end

local function picks_of(shard, turns)
  return is_there(shard, turns, 'hash') and number_of(get(turns, 'picks')) or 0
end

local function next_in_line(shard, turns, may_go)
  local picks = picks_of(shard, turns) + 1
  for _, class in ipairs(ORDERS[picks % 8] or USUAL_ORDER) do
    local member, is_held = first_in_line(shard, turns, class, may_go)
    if is_held and not ORDERS[picks % 8] then return nil end
    if member then
      redis.call('HSET', turns, 'picks', string.format('%.0f', picks))
      return member
    end
  end
  return nil
end

-- Whether one in a pool's line may go to a node that has a line too, as if it stood there; it pays for its place there.
-- The node's time is the place that was taken last in its line, so tenants have their shares over both lines. If not
-- because of its tenant's share, also by how much that is ahead.
local function goes_before(shard, line, class, tenant)
  local picks = picks_of(shard, line)
  for _, other in ipairs(ORDERS[(picks + 1) % 8] or USUAL_ORDER) do
    if other == class then break end
    if redis.call('EXISTS', line .. ':' .. other) == 1 then return false end
  end
  if redis.call('EXISTS', line .. ':' .. class) == 1 then
    local shares, name, weight = line .. ':' .. class .. ':shares', share_of(shard, tenant)
    is_there(shard, shares, 'hash')
    local found = redis.call('HMGET', shares, ':at', name)
    local now, place = number_of(found[1]) or 0, number_of(found[2]) or 0
    if place > now and (picks + 1) % 8 ~= TURN_OF_POOLS then return false, place - now end
    redis.call('HSET', shares, name, string.format('%.6f', math.max(now, place) + 1 / weight))
    trim_shares(shares, now)
  end
  redis.call('HSET', line, 'picks', string.format('%.0f', picks + 1))
  return true
end

-- Fill the window of a stream with those whose turn it is.
-- hand_over(shard, stream, member): puts the entry into the stream; returns whether there is still need of it
-- may_go(class, member): whether the first of a class may go now; nil: yes
local function pump(shard, stream, group, hand_over, may_go)
  local turns = turns_of(shard, stream)
  if not has_waiting(turns) then return end
  local room = room_in(shard, stream, group)
  for _ = 1, MAX_TURNS do
    local member = room > 0 and next_in_line(shard, turns, may_go)
    if not member then break end
    if attempt(shard, turns, member, hand_over, shard, stream, member) then room = room - 1 end
  end
  if not has_waiting(turns) then redis.call('DEL', turns) end
end

-- Take one out of a line whose turn will not come.
local function leave_line(shard, stream, member)
  local turns = turns_of(shard, stream)
  for _, class in ipairs(USUAL_ORDER) do
    local queue = turns .. ':' .. class
    if is_there(shard, queue, 'zset') and redis.call('ZREM', queue, member) == 1 and redis.call('ZCARD', queue) == 0 then
      redis.call('DEL', queue .. ':shares')
    end
  end
  if not has_waiting(turns) then redis.call('DEL', turns) end
end

-- Forget who lines up for a stream.
local function forget_line(shard, stream)
  local turns = turns_of(shard, stream)
  redis.call('DEL', turns)
  for _, class in ipairs(USUAL_ORDER) do redis.call('DEL', turns .. ':' .. class, turns .. ':' .. class .. ':shares') end
end
