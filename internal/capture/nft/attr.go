//go:build linux

package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// A message is what one netlink message carries after its header: attributes, RFC 3549
// section 2.2. Integers of nf_tables are big-endian.
type message []byte

const attrHeader = 4 // length and type, of the host's byte order

// put appends an attribute and pads it to 4 bytes.
func (m *message) put(kind uint16, value []byte) {
	*m = binary.NativeEndian.AppendUint16(*m, uint16(attrHeader+len(value)))
	*m = binary.NativeEndian.AppendUint16(*m, kind)
	*m = append(*m, value...)
	for len(*m)%4 != 0 {
		*m = append(*m, 0)
	}
}

func (m *message) putUint32(kind uint16, v uint32) {
	m.put(kind, binary.BigEndian.AppendUint32(nil, v))
}

// putString appends a string with the zero byte that the kernel wants.
func (m *message) putString(kind uint16, s string) { m.put(kind, append([]byte(s), 0)) }

// nest appends an attribute whose value is what f appends.
func (m *message) nest(kind uint16, f func(*message)) {
	at := len(*m)
	*m = append(*m, 0, 0, 0, 0)
	f(m)
	binary.NativeEndian.PutUint16((*m)[at:], uint16(len(*m)-at))
	binary.NativeEndian.PutUint16((*m)[at+2:], kind|unix.NLA_F_NESTED)
}

// A batch is the messages of one transaction.
type batch struct {
	buf   []byte
	whats []string // what each message is for, by its sequence number - 1
}

// begin makes the batch one of nf_tables.
func (b *batch) begin() {
	b.add("begin the transaction", unix.NFNL_MSG_BATCH_BEGIN, unix.NLM_F_REQUEST, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil)
}

// end asks for the answer of the whole batch.
func (b *batch) end() {
	b.add("end the transaction", unix.NFNL_MSG_BATCH_END, unix.NLM_F_REQUEST, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES, nil)
}

// command adds a message of nf_tables for the family inet. The kernel answers it.
func (b *batch) command(what string, command, flags uint16, f func(*message)) {
	var m message
	f(&m)
	b.add(what, unix.NFNL_SUBSYS_NFTABLES<<8|command, unix.NLM_F_REQUEST|flags, unix.NFPROTO_INET, 0, m)
}

// add appends a message: struct nlmsghdr, struct nfgenmsg, attributes.
func (b *batch) add(what string, kind, flags uint16, family byte, resource uint16, attrs message) {
	b.whats = append(b.whats, what)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(unix.NLMSG_HDRLEN+4+len(attrs)))
	b.buf = binary.NativeEndian.AppendUint16(b.buf, kind)
	b.buf = binary.NativeEndian.AppendUint16(b.buf, flags)
	b.buf = binary.NativeEndian.AppendUint32(b.buf, uint32(len(b.whats)))
	b.buf = binary.NativeEndian.AppendUint32(b.buf, 0) // of the kernel's choice
	b.buf = append(b.buf, family, unix.NFNETLINK_V0)
	b.buf = binary.BigEndian.AppendUint16(b.buf, resource)
	b.buf = append(b.buf, attrs...)
}
