package capture

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"culvert.dev/internal/capture/nft"
)

// Show returns the captures in the network namespace of the thread, those of every Name and
// process. It needs CAP_NET_ADMIN.
func Show() ([]Status, error) {
	conn, err := nft.Open()
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	defer conn.Close()
	tables, err := conn.Tables(IsTable)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	all := []Status{}
	for i := range tables {
		all = append(all, statusOf(&tables[i]))
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// statusOf returns what a table of this package says.
func statusOf(t *nft.Found) Status {
	s := Status{Table: t.Name, Name: strings.TrimPrefix(strings.TrimPrefix(t.Name, Table), "-")}
	if t.Owned {
		s.Owner = findOwner(t.Owner)
	}
	for _, r := range t.Rules {
		s.add(t, r)
	}
	for _, name := range []string{"except4", "except6"} {
		s.ExceptCIDRs = appendRanges(s.ExceptCIDRs, t.Sets[name])
	}
	s.ListensIPv4, s.ListensIPv6 = listens("tcp", s.Port), listens("tcp6", s.Port)
	return s
}

// add adds what a rule says.
func (s *Status) add(t *nft.Found, r nft.FoundRule) {
	has := map[nft.TermKind][]byte{}
	for _, term := range r.Terms {
		has[term.Kind] = append([]byte{}, term.Value...)
	}
	number := func(kind nft.TermKind) uint32 {
		if v := has[kind]; len(v) == 4 {
			return binary.NativeEndian.Uint32(v)
		}
		return 0
	}
	port := func(kind nft.TermKind) uint16 {
		if v := has[kind]; len(v) == 2 {
			return binary.BigEndian.Uint16(v)
		}
		return 0
	}
	name, inSet := has[nft.TermInSet]
	_, uid := has[nft.TermUID]
	_, mark := has[nft.TermMark]
	_, returns := has[nft.TermReturn]
	if from, ok := has[nft.TermInterface]; ok {
		s.Interfaces = appendNew(s.Interfaces, strings.TrimRight(string(from), "\x00"))
	}
	if p := port(nft.TermTProxy); p != 0 {
		s.TransparentPort = p
	}
	to := port(nft.TermRedirect)
	switch {
	case returns && uid:
		s.ExceptUIDs = appendNew(s.ExceptUIDs, number(nft.TermUID))
		return
	case returns && mark:
		s.ExceptMark = number(nft.TermMark)
		return
	case to == 0:
		return
	case port(nft.TermToPort) == dnsPort:
		s.DNSPort = to
		return
	}
	s.Port = to
	if _, local := has[nft.TermLocal]; local || r.Chain != chainOutput { // see table: a local one captures nothing
		return
	}
	switch {
	case !inSet:
		s.All = true
	case strings.HasPrefix(string(name), "vips"):
		s.VIPs = appendRanges(s.VIPs, t.Sets[string(name)])
	default:
		s.CIDRs = appendRanges(s.CIDRs, t.Sets[string(name)])
	}
	if uid {
		s.UIDs = appendNew(s.UIDs, number(nft.TermUID))
	}
	if v := has[nft.TermCgroup]; len(v) == 8 {
		s.Cgroups = appendNew(s.Cgroups, cgroupPath(binary.NativeEndian.Uint64(v)))
	}
}

func appendNew[T comparable](list []T, v T) []T {
	if slices.Contains(list, v) {
		return list
	}
	return append(list, v)
}

// appendRanges appends those that are not there: a set stands in a rule of each program.
func appendRanges(list []string, ranges []nft.Range) []string {
	if len(ranges) > 0 && slices.Contains(list, ranges[0].String()) {
		return list
	}
	for _, r := range ranges {
		list = append(list, r.String())
	}
	return list
}

// cgroupPath returns the path of a cgroup, or says its number where it is not there any more.
func cgroupPath(id uint64) string {
	found := fmt.Sprintf("number %d, which is gone", id)
	for _, root := range cgroupRoots {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // it has gone meanwhile
			}
			if info, err := d.Info(); err == nil && info.Sys().(*syscall.Stat_t).Ino == id {
				found, _ = filepath.Rel(root, path)
				return fs.SkipAll
			}
			return nil
		})
		break
	}
	return found
}

// findOwner returns the process that has a socket of nftables.
func findOwner(port uint32) *Owner {
	o := &Owner{}
	socket := ""
	eachField("netlink", func(f []string) {
		if len(f) > 9 && f[1] == strconv.Itoa(syscall.NETLINK_NETFILTER) && f[2] == strconv.FormatUint(uint64(port), 10) {
			socket = "socket:[" + f[9] + "]"
		}
	})
	if socket == "" {
		return o
	}
	descriptors, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range descriptors {
		if to, err := os.Readlink(fd); err == nil && to == socket {
			dir := filepath.Dir(filepath.Dir(fd))
			o.PID, _ = strconv.Atoi(filepath.Base(dir))
			comm, _ := os.ReadFile(filepath.Join(dir, "comm"))
			o.Program = strings.TrimSpace(string(comm))
			return o
		}
	}
	return o
}

// listens reports whether a program listens at a port, at the loopback address or at all of them.
func listens(table string, port uint16) (found bool) {
	const listening = "0A"
	at := map[string]bool{}
	for _, host := range []string{"00000000", "0100007F", "7F000001", strings.Repeat("0", 32), strings.Repeat("0", 24) + "01000000", strings.Repeat("0", 31) + "1"} {
		at[fmt.Sprintf("%s:%04X", host, port)] = true
	}
	eachField(table, func(f []string) {
		found = found || len(f) > 3 && f[3] == listening && at[f[1]]
	})
	return found
}

// eachField calls f with the fields of each line of a file of the network namespace.
func eachField(name string, f func([]string)) {
	file, err := os.Open(filepath.Join("/proc/thread-self/net", name))
	if err != nil {
		return
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		f(strings.Fields(lines.Text()))
	}
}
