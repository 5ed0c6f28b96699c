package file

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// ParseRoute parses the "NAME[:PORT]=HOST:PORT" of a command line into an
// exposed service with one endpoint. NAME may be a wildcard, "*.example.com";
// without a PORT the service takes whatever port is asked for.
func ParseRoute(s string) (*registry.Service, error) {
	name, endpoint, ok := strings.Cut(s, "=")
	if !ok {
		return nil, fmt.Errorf("route %q has no =: write NAME[:PORT]=HOST:PORT", clip(s))
	}
	svc, c := route(name, endpoint)
	if c != nil {
		err := fmt.Errorf("route %q: %s", clip(s), c.msg)
		if c.hint != "" {
			err = fmt.Errorf("%w; %s", err, c.hint)
		}
		return nil, err
	}
	svc.Origin = "--route " + s
	return svc, nil
}

// ParseRoutes reads a "NAME[:PORT] HOST:PORT" per line. What follows a # is a
// comment. Lines with the same NAME[:PORT] are endpoints of one service.
// Mistakes are returned as Errors.
func ParseRoutes(name string, data []byte) ([]*registry.Service, error) {
	var errs Errors
	services := make([]*registry.Service, 0, strings.Count(string(data), "\n")+1)
	if len(data) > maxSize {
		return nil, Errors{{File: name, Line: 1, Column: 1, Msg: fmt.Sprintf("the file has %d bytes, limit %d", len(data), maxSize)}}
	}
	base := filepath.Base(name) + ":"
	n := 0
	for line := range strings.Lines(string(data)) {
		n++
		line, _, _ = strings.Cut(strings.TrimRight(line, "\r\n"), "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		wrong := func(c *complaint) {
			at := &Error{File: name, Line: n, Column: column(line, c.offset), Msg: c.msg, Hint: c.hint}
			if len(errs) <= maxErrors {
				errs = append(errs, at)
			}
		}
		if len(fields) != 2 {
			c := complain("write NAME[:PORT] HOST:PORT", "a route has 2 fields, and this line %d", len(fields))
			c.offset = strings.Index(line, fields[0])
			wrong(c)
			continue
		}
		svc, c := route(fields[0], fields[1])
		if c != nil {
			c.msg = fmt.Sprintf("route %q: %s", clip(strings.Join(fields, " ")), c.msg)
			start := strings.Index(line, fields[0])
			if c.offset > 0 {
				start += len(fields[0]) + strings.Index(line[start+len(fields[0]):], fields[1])
			}
			c.offset = start
			wrong(c)
			continue
		}
		svc.Origin = base + strconv.Itoa(n)
		services = append(services, svc)
	}
	if err := errs.sorted(); err != nil {
		return nil, err
	}
	return JoinRoutes(services), nil
}

// column turns an offset in bytes into a column in characters.
func column(line string, offset int) int { return len([]rune(line[:min(offset, len(line))])) + 1 }

// route makes a service of one route. The offset of a complaint is 0 where
// the name is at fault and 1 where the endpoint is.
func route(name, endpoint string) (*registry.Service, *complaint) {
	if scheme, _, ok := strings.Cut(name, "://"); ok {
		return nil, complain("leave out "+clip(scheme)+"://", "a route is NAME[:PORT]=HOST:PORT")
	}
	host, port, c := name, uint16(0), (*complaint)(nil)
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		host = name[:i]
		if port, c = parsePort(name[i+1:]); c != nil {
			return nil, c
		}
	}
	p, c := parsePattern(host)
	if c == nil && p.Suffix.IsReserved() {
		c = complain("give the service another name", registry.ReservedName)
	}
	if c != nil {
		return nil, c
	}
	ep, c := parseEndpoint(endpoint)
	if c == nil && ep.Port == 0 {
		c = complain("write HOST:PORT", "the endpoint has no port")
	}
	if c != nil {
		c.offset = 1
		return nil, c
	}
	svc := &registry.Service{
		Name: p.String(), Names: []tunnel.Pattern{p}, Exposed: true,
		Endpoints: []registry.Endpoint{ep},
	}
	if port != 0 {
		svc.Ports = []uint16{port}
	}
	return svc, nil
}

// JoinRoutes puts the endpoints of routes with the same name and port into one
// service, in place of the first of them. An endpoint given twice counts once.
func JoinRoutes(routes []*registry.Service) []*registry.Service {
	type key struct {
		name string
		port uint16
	}
	at := make(map[key]int, len(routes))
	joined := make([]*registry.Service, 0, len(routes)) // growing it would cost more than all the rest
	ours := map[int]bool{}                              // of joined, those that are copies
	for _, r := range routes {
		k := key{name: r.Name}
		if len(r.Ports) > 0 {
			k.port = r.Ports[0]
		}
		i, ok := at[k]
		if !ok {
			at[k] = len(joined)
			joined = append(joined, r)
			continue
		}
		if !ours[i] {
			s := *joined[i]
			s.Endpoints = slices.Clone(s.Endpoints)
			joined[i], ours[i] = &s, true
		}
		joined[i].Endpoints = append(joined[i].Endpoints, r.Endpoints...)
	}
	for i := range ours {
		joined[i].Endpoints = unique(joined[i].Endpoints)
	}
	return joined
}

func unique(eps []registry.Endpoint) []registry.Endpoint {
	if len(eps) < 2 {
		return eps
	}
	seen := make(map[registry.Endpoint]bool, len(eps))
	out := make([]registry.Endpoint, 0, len(eps))
	for _, ep := range eps {
		if !seen[ep] {
			seen[ep] = true
			out = append(out, ep)
		}
	}
	return out
}
