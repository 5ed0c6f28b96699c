package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"culvert.dev/internal/capture/nft"
	"culvert.dev/internal/capture/route"
)

// Errors that callers tell apart.
var (
	ErrNotPermitted = nft.ErrNotPermitted // the process lacks CAP_NET_ADMIN
	ErrOwned        = nft.ErrOwned        // another process has the table
)

// A Capture is the installed Rules.
type Capture struct {
	mu      sync.Mutex // guards what follows
	closed  bool
	conn    *nft.Conn
	routes  *route.Conn
	vips4   []netip.Addr // in the kernel, sorted
	vips6   []netip.Addr
	rules   Rules
	cgroups []cgroup // of rules
}

// Install installs r in the network namespace of the thread, in place of a table that stayed
// from before. After an error it leaves nothing. The caller closes the Capture.
func Install(r Rules) (*Capture, error) {
	c, err := install(r)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return c, nil
}

func install(r Rules) (c *Capture, err error) {
	c = &Capture{}
	if c.conn, c.routes, err = open(&r); err != nil {
		return nil, err
	}
	// The table comes first: with it the name belongs to this process, and what stayed of
	// another one's rules of routing may be taken away.
	if err := c.replace(r); err != nil {
		_ = c.closeSockets()
		return nil, err
	}
	if err := c.route(); err != nil {
		_ = remove(c.conn, c.routes, &r)
		_ = c.closeSockets()
		return nil, err
	}
	return c, nil
}

// open completes r and opens sockets to the kernel.
func open(r *Rules) (*nft.Conn, *route.Conn, error) {
	if err := r.complete(); err != nil {
		return nil, nil, err
	}
	conn, err := nft.Open()
	if err != nil {
		return nil, nil, err
	}
	routes, err := route.Open()
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, routes, nil
}

func (c *Capture) closeSockets() error { return errors.Join(c.conn.Close(), c.routes.Close()) }

// replace installs r, with the VIPs that are there.
func (c *Capture) replace(r Rules) error {
	cgroups, err := findCgroups(r.Cgroups)
	if err != nil {
		return err
	}
	if err := c.conn.Replace(table(&r, cgroups, c.vips4, c.vips6)); err != nil {
		return err
	}
	c.rules, c.cgroups = r, cgroups
	return nil
}

// Remove removes what Install of r has left where its process has ended: by Stay, or killed.
// What is not there is no error; a table whose process lives is one, and stays.
func Remove(r Rules) error {
	conn, routes, err := open(&r)
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	defer conn.Close()
	defer routes.Close()
	if err := remove(conn, routes, &r); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

// remove deletes the table of r, and then its rules of routing.
func remove(conn *nft.Conn, routes *route.Conn, r *Rules) error {
	if err := conn.Delete(TableName(r.Name)); err != nil && !errors.Is(err, syscall.ENOENT) {
		return err
	}
	return unroute(routes, r)
}

// Update replaces the Rules by others of the same Name and Stay, in one transaction, and keeps
// the VIPs. Cgroups that were made anew are found again. After an error the rules are as they
// were.
func (c *Capture) Update(r Rules) error {
	if err := r.complete(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.rules
	if r.Name != before.Name || r.Stay != before.Stay {
		return fmt.Errorf("capture: the rules of table %s can't become those of %s: close them, and install the others", TableName(before.Name), TableName(r.Name))
	}
	if err := c.replace(r); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	if before.TransparentMark != r.TransparentMark || before.RoutingTable != r.RoutingTable {
		_ = unroute(c.routes, &before)
	}
	if err := c.route(); err != nil {
		_ = c.replace(before)
		_ = c.route()
		return fmt.Errorf("capture: %w", err)
	}
	return nil
}

// Refresh looks at the Cgroups of the Rules again: the kernel knows one by a number, which is
// another one after it was removed and made anew. One that is not there now keeps its number.
func (c *Capture) Refresh() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := slices.Clone(c.cgroups)
	for i, path := range c.rules.Cgroups {
		if found, err := findCgroup(path); err == nil {
			now[i] = found
		}
	}
	if slices.Equal(now, c.cgroups) {
		return nil
	}
	if err := c.conn.Replace(table(&c.rules, now, c.vips4, c.vips6)); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	c.cgroups = now
	return nil
}

// SetVIPs replaces the VIPs, in one transaction. After an error they are as they were.
func (c *Capture) SetVIPs(addrs []netip.Addr) error {
	var v4, v6 []netip.Addr
	for _, a := range addrs {
		if a = a.Unmap(); a.Is4() {
			v4 = append(v4, a)
		} else if a.IsValid() {
			v6 = append(v6, a)
		}
	}
	normal := func(list []netip.Addr) []netip.Addr {
		slices.SortFunc(list, netip.Addr.Compare)
		return slices.Compact(list)
	}
	v4, v6 = normal(v4), normal(v6)
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.conn.ChangeSets(TableName(c.rules.Name), change("vips4", c.vips4, v4), change("vips6", c.vips6, v6))
	if err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	c.vips4, c.vips6 = v4, v6
	return nil
}

// change returns what makes before after. Both are sorted.
func change(set string, before, after []netip.Addr) nft.SetChange {
	c := nft.SetChange{Set: set}
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].Less(after[0]):
			c.Removed, before = append(c.Removed, before[0]), before[1:]
		case len(before) == 0 || after[0].Less(before[0]):
			c.Added, after = append(c.Added, after[0]), after[1:]
		default:
			before, after = before[1:], after[1:]
		}
	}
	return c
}

// Close ends the capture, unless the Rules stay. It works on any thread.
func (c *Capture) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if !c.rules.Stay && !c.closed {
		err = remove(c.conn, c.routes, &c.rules)
	}
	c.closed = true
	return errors.Join(err, c.closeSockets())
}

// route has packets for the TransparentPort come to this host, and has nothing where the Rules
// have none. What it adds has no effect on others.
func (c *Capture) route() error {
	r := &c.rules
	if r.TransparentPort == 0 {
		return unroute(c.routes, r)
	}
	for i, to := range anywhere {
		err := c.routes.AddRoute(route.Route{To: to, Local: true, Table: r.RoutingTable})
		if err == nil {
			err = c.routes.AddRule(r.routing(i == 1))
		}
		if err != nil && !(i == 1 && route.NoFamily(err)) {
			return err
		}
	}
	return nil
}

// anywhere is every address, of IPv4 and of IPv6.
var anywhere = [2]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}

// priorityRouting is before the rules of VPNs, which take all packets but their own.
const priorityRouting = 76

// routing returns the rule of routing for packets to the TransparentPort.
func (r *Rules) routing(ipv6 bool) route.Rule {
	return route.Rule{IPv6: ipv6, Mark: r.TransparentMark, Table: r.RoutingTable, Priority: priorityRouting}
}

// unroute takes away what route has added.
func unroute(routes *route.Conn, r *Rules) (err error) {
	for i, to := range anywhere {
		err = errors.Join(err,
			routes.DeleteRule(r.routing(i == 1)),
			routes.DeleteRoute(route.Route{To: to, Local: true, Table: r.RoutingTable}))
	}
	return err
}
