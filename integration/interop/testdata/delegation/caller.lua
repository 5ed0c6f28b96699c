-- An action of HAProxy for streams that begin with a PROXY header of version 2, in TLS that
-- HAProxy has ended: it sets txn.caller to the value 0xE2, whom the gateway states. Nothing is
-- taken from the stream.
core.register_action("caller", { "tcp-req" }, function(txn)
  local b = txn.req:data(0, 16)
  if b == nil or #b < 16 or b:sub(1, 12) ~= "\r\n\r\n\0\r\nQUIT\n" or b:byte(13) ~= 0x21 then return end
  local length = string.unpack(">I2", b, 15)
  local at = ({ [0x00] = 0, [0x11] = 12, [0x21] = 36, [0x31] = 216 })[b:byte(14)]
  b = txn.req:data(16, length)
  if at == nil or b == nil or #b < length then return end
  while at + 3 <= length do
    local kind, size = string.unpack(">BI2", b, at + 1)
    if at + 3 + size > length then return end
    if kind == 0xE2 then txn:set_var("txn.caller", b:sub(at + 4, at + 3 + size)) end
    at = at + 3 + size
  end
end)
