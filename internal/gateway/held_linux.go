package gateway

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// boundAddresses returns the addresses at which sockets of this network namespace, of any
// process, listen at a port of TCP or are bound to one of UDP; nil where that is not known.
func boundAddresses(udp bool, port uint16) (all []netip.Addr) {
	kind := "tcp"
	if udp {
		kind = "udp"
	}
	for _, family := range []string{"", "6"} {
		f, err := os.Open("/proc/self/net/" + kind + family)
		if err != nil {
			continue
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			// sl local_address rem_address st ..., as in proc_pid_net(5)
			fields := strings.Fields(lines.Text())
			if len(fields) < 4 || fields[0] == "sl" {
				continue
			}
			if !udp && fields[3] != "0A" { // those that listen come first
				break
			}
			if a, p, ok := parseBound(fields[1]); ok && p == port {
				all = append(all, a)
			}
		}
		_ = f.Close()
	}
	return all
}

// parseBound reads ADDRESS:PORT in hexadecimal digits: an address is of words of 32 bits in
// the byte order of the machine.
func parseBound(s string) (a netip.Addr, port uint16, ok bool) {
	address, digits, _ := strings.Cut(s, ":")
	n, err := strconv.ParseUint(digits, 16, 16)
	b, hexErr := hex.DecodeString(address)
	if err != nil || hexErr != nil || len(b)%4 != 0 {
		return a, 0, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	a, ok = netip.AddrFromSlice(b)
	return a.Unmap(), uint16(n), ok
}
