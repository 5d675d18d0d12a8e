-- Notebooks: notes that outlive a conversation. Keys: the notebook, a hash id -> note; shard base  :notebooks  set

-- write_note: add a note to a notebook with room for it, or replace the one with its id.
-- KEYS notebook, shard base.  ARGV name of the notebook, id, note, maximum number of notes.  returns {'written'} {'full'}
local function write_note(keys, args)
  local notes, id = keys[1], args[2]
  if redis.call('HEXISTS', notes, id) == 0 and redis.call('HLEN', notes) >= tonumber(args[4]) then return {'full'} end
  redis.call('HSET', notes, id, args[3])
  redis.call('SADD', keys[2] .. ':notebooks', args[1])
  return {'written'}
end

redis.register_function('deck_write_note', write_note)
