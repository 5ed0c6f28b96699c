package dns

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// fileCheckInterval is how often a file is checked for changes.
const fileCheckInterval = 5 * time.Second

// maxFile limits the bytes of a file that are read.
const maxFile = 16 << 20

// A cached is the parsed content of a file, which is read again when it has changed.
type cached[T any] struct {
	mu       sync.Mutex // guards what follows
	value    T
	looked   time.Time
	modified time.Time
	size     int64
}

// get returns the result of parse for the file at path. A file that cannot be read
// counts as empty; parse gets nil for it.
func (c *cached[T]) get(path string, now time.Time, parse func([]byte) T) T {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.looked.IsZero() && now.Sub(c.looked) < fileCheckInterval {
		return c.value
	}
	first := c.looked.IsZero()
	c.looked = now
	info, err := os.Stat(path)
	switch {
	case err != nil:
		if first || c.size >= 0 {
			c.value, c.size = parse(nil), -1
		}
	case first || info.Size() != c.size || !info.ModTime().Equal(c.modified):
		c.size, c.modified = info.Size(), info.ModTime()
		c.value = parse(readFile(path))
	}
	return c.value
}

func readFile(path string) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return nil
	}
	return data
}

// A config is the content of resolv.conf.
type config struct {
	servers []string // host:port; none means that the standard library is asked
	search  []string // without trailing dots
	ndots   int
}

// settings returns the present configuration.
func (r *Resolver) settings() *config {
	if len(r.Servers) > 0 {
		c := &config{}
		for _, s := range r.Servers {
			c.servers = append(c.servers, withPort(s))
		}
		return c
	}
	path := r.ResolvConf
	if path == "" {
		path = "/etc/resolv.conf"
	}
	return r.conf.get(path, r.clock(), parseResolvConf)
}

// Upstreams returns the addresses of the servers that are asked now. There are none on systems
// without resolv.conf.
func (r *Resolver) Upstreams() (all []netip.Addr) {
	for _, s := range r.settings().servers {
		host, _, _ := net.SplitHostPort(s)
		if addr, err := netip.ParseAddr(host); err == nil {
			all = append(all, addr)
		}
	}
	return all
}

func parseResolvConf(data []byte) *config {
	c := &config{}
	cc, err := dns.ClientConfigFromReader(bytes.NewReader(data))
	if err != nil || data == nil {
		return c
	}
	c.ndots = cc.Ndots
	for _, s := range cc.Servers {
		c.servers = append(c.servers, net.JoinHostPort(s, cc.Port))
	}
	for _, s := range cc.Search {
		if s = strings.Trim(strings.ToLower(s), "."); s != "" {
			c.search = append(c.search, s)
		}
	}
	return c
}

func withPort(server string) string { return withDefaultPort(server, "53") }

func withDefaultPort(server, port string) string {
	if _, err := netip.ParseAddr(server); err == nil {
		return net.JoinHostPort(server, port)
	}
	if _, _, err := net.SplitHostPort(server); err != nil {
		return net.JoinHostPort(server, port)
	}
	return server
}

// candidates returns the full names that name may mean, in order.
func (c *config) candidates(name string, absolute bool) []string {
	if absolute || strings.Count(name, ".") >= c.ndots {
		return []string{name}
	}
	var names []string
	for _, s := range c.search {
		if len(name)+1+len(s) <= 253 {
			names = append(names, name+"."+s)
		}
	}
	return append(names, name)
}

// fromHosts returns the addresses of name in the hosts file.
func (r *Resolver) fromHosts(name string) []netip.Addr {
	path := r.Hosts
	if path == "" {
		path = "/etc/hosts"
	}
	return r.hosts.get(path, r.clock(), parseHosts)[name]
}

func parseHosts(data []byte) map[string][]netip.Addr {
	hosts := map[string][]netip.Addr{}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		a, err := netip.ParseAddr(fields[0])
		if err != nil {
			continue
		}
		for _, name := range fields[1:] {
			name = strings.ToLower(strings.TrimSuffix(name, "."))
			if len(hosts[name]) < maxAddrs {
				hosts[name] = append(hosts[name], a.WithZone(""))
			}
		}
	}
	return hosts
}
