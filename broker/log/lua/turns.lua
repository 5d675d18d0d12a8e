-- Turns: order the entries of a stream when more wait than are taken soon.
--
-- A stream holds only as many undelivered entries as are taken soon, its window. Further ones wait in a line and enter the
-- stream in their turn, whenever an entry is taken and with each beat. While there is no line, nothing is ordered, and an
-- entry costs one or two more reads.
-- Keys:  shard base  :turns:<stream>                  hash  picks -> number of turns so far
--                    :turns:<stream>:<class>          zset  waiting member -> place, the lowest is next
--                    :turns:<stream>:<class>:shares   hash  see limits/fair_queue.lua, which orders them
-- Classes are '0' interactive, '1' normal, '2' batch.

local fair_queue = require('limits/fair_queue')
local groups = require('log/lua/groups')
local store = require('store/prelude')
local tenants = require('log/lua/tenants')
local turns = {}

local WINDOW = 8
local MAX_TURNS = 64
local MAX_STEPPING_BACK = 8
local TURN_OF_POOLS = 2  -- modulo 8: at this turn of a node, the first in a pool's line goes, of any tenant
turns.WAITING = 'turn'  -- in place of an entry's id while a member waits in a line

function turns.line_of(shard, stream)
  return shard .. ':turns' .. string.sub(stream, #shard + 1)
end

local function window_of(shard)
  return math.max(WINDOW, 2 * redis.call('ZCARD', shard .. ':workers'))
end

-- The free part of a stream's window: how many more undelivered entries it may hold.
local function room_in(shard, stream, group)
  local window, found = window_of(shard), groups.find(shard, stream, group)
  if not found then return window - redis.call('XLEN', stream) end
  local waiting = found['lag']
  -- The server does not always know it. Redis 7.0 reports too much once a replica was promoted.
  if not waiting or waiting >= window then
    waiting = #redis.call('XRANGE', stream, '(' .. found['last-delivered-id'], '+', 'COUNT', window)
  end
  return window - waiting
end

function turns.has_waiting(line)
  return redis.call('EXISTS', line .. ':0', line .. ':1', line .. ':2') > 0
end

function turns.is_in_line(shard, stream, member)
  local line = turns.line_of(shard, stream)
  for _, class in ipairs(fair_queue.CLASSES) do
    local queue = line .. ':' .. class
    if store.is_there(shard, queue, 'zset') and fair_queue.place_in(queue, member) then return true end
  end
  return false
end

local function queue_of(line, class)
  return line .. ':' .. class, line .. ':' .. class .. ':shares'
end

-- Join the line of a stream if there is one, or if the window is full. Returns whether it did; the caller then records
-- this and pumps.
function turns.line_up(shard, stream, group, member, class, tenant)
  if redis.call('XLEN', stream) < WINDOW then return false end
  local line = turns.line_of(shard, stream)
  if not turns.has_waiting(line) and room_in(shard, stream, group) > 0 then return false end
  if class ~= '0' and class ~= '2' then class = '1' end
  local queue, shares = queue_of(line, class)
  -- A member that is notified again keeps its place and is charged only once.
  if store.is_there(shard, queue, 'zset') and fair_queue.place_in(queue, member) then return true end
  store.is_there(shard, shares, 'hash')
  local name, weight = tenants.share_of(shard, tenant or '')
  fair_queue.join(queue, member, fair_queue.charge(shares, name, weight, fair_queue.places_of(shares, name)))
  return true
end

-- Take the first member of a class. Returns it; or nil, and whether one waits that may not go now. If its tenant is ahead
-- of its share, the member steps back by as much, so that it does not block other tenants.
local function take_first(shard, line, class, may_go)
  local queue, shares = queue_of(line, class)
  if not store.is_there(shard, queue, 'zset') then return nil end
  store.is_there(shard, shares, 'hash')
  for _ = 1, MAX_STEPPING_BACK do
    local member, place = fair_queue.first(queue)
    local goes, ahead = true, nil
    if may_go then goes, ahead = may_go(class, member) end
    if goes then
      fair_queue.leave(queue, member)
      if not fair_queue.forget_shares(queue, shares) then fair_queue.advance(shares, place) end
      return member
    end
    if not ahead or redis.call('ZCARD', queue) == 1 then return nil, true end
    fair_queue.join(queue, member, string.format('%.6f', place + ahead))
  end
  return nil, true
end

local function picks_of(shard, line)
  return store.is_there(shard, line, 'hash') and store.number_of(store.get(line, 'picks')) or 0
end

local function take_next(shard, line, may_go)
  local turn = picks_of(shard, line) + 1
  local classes, is_reserved = fair_queue.classes_at(turn)
  for _, class in ipairs(classes) do
    local member, is_held = take_first(shard, line, class, may_go)
    if is_held and not is_reserved then return nil end
    if member then
      redis.call('HSET', line, 'picks', string.format('%.0f', turn))
      return member
    end
  end
  return nil
end

-- Whether a member of a pool's line may go to a node that has a line too, as if it were in the node's line, whose place it
-- pays for. The node's virtual time is the place taken last in its line, so tenants get their shares over both lines. If
-- the tenant's share forbids it, also returns how far the tenant is ahead.
function turns.goes_before(shard, line, class, tenant)
  local turn = picks_of(shard, line) + 1
  for _, other in ipairs((fair_queue.classes_at(turn))) do
    if other == class then break end
    if redis.call('EXISTS', line .. ':' .. other) == 1 then return false end
  end
  local queue, shares = queue_of(line, class)
  if redis.call('EXISTS', queue) == 1 then
    local name, weight = tenants.share_of(shard, tenant)
    store.is_there(shard, shares, 'hash')
    local at, place = fair_queue.places_of(shares, name)
    if place > at and turn % 8 ~= TURN_OF_POOLS then return false, place - at end
    fair_queue.charge(shares, name, weight, at, place)
  end
  redis.call('HSET', line, 'picks', string.format('%.0f', turn))
  return true
end

-- Fill the window of a stream with the members whose turn it is.
-- hand_over(shard, stream, member): puts the entry into the stream; returns whether it was still needed
-- may_go(class, member): whether the first of a class may go now; nil for always
function turns.pump(shard, stream, group, hand_over, may_go)
  local line = turns.line_of(shard, stream)
  if not turns.has_waiting(line) then return end
  local room = room_in(shard, stream, group)
  for _ = 1, MAX_TURNS do
    local member = room > 0 and take_next(shard, line, may_go)
    if not member then break end
    if store.attempt(shard, line, member, hand_over, shard, stream, member) then room = room - 1 end
  end
  if not turns.has_waiting(line) then redis.call('DEL', line) end
end

-- Remove a member that needs no turn any more from a line.
function turns.leave_line(shard, stream, member)
  local line = turns.line_of(shard, stream)
  for _, class in ipairs(fair_queue.CLASSES) do
    local queue, shares = queue_of(line, class)
    if store.is_there(shard, queue, 'zset') and fair_queue.leave(queue, member) then
      fair_queue.forget_shares(queue, shares)
    end
  end
  if not turns.has_waiting(line) then redis.call('DEL', line) end
end

-- Empty a line: hand over every member, even if the window is full.
function turns.end_line(shard, stream, hand_over)
  local line = turns.line_of(shard, stream)
  for _, class in ipairs(fair_queue.CLASSES) do
    local queue, shares = queue_of(line, class)
    if store.is_there(shard, queue, 'zset') then
      for _, member in ipairs(redis.call('ZRANGE', queue, 0, 999)) do
        store.attempt(shard, queue, member, hand_over, shard, stream, member)
        fair_queue.leave(queue, member)
      end
    end
    fair_queue.forget_shares(queue, shares)
  end
  if not turns.has_waiting(line) then redis.call('DEL', line) end
end

return turns
