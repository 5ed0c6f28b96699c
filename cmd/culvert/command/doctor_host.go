package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"culvert.dev/internal/capture"
	"culvert.dev/registry/file"
)

// ports looks whether other programs have the ports of the configuration.
func (d *doctor) ports(c *file.Config) {
	free, used := 0, 0
	for i := range c.Listeners {
		address := c.Listeners[i].Address
		if strings.Contains(address, ":/") || strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "fd:") || strings.HasPrefix(address, "udp:") {
			continue
		}
		ln, err := net.Listen("tcp", address)
		switch {
		case err == nil:
			_ = ln.Close()
			free++
		case errors.Is(err, syscall.EADDRINUSE) && isCulvert(address):
			used++
			d.add("port", address, checkOK, "", "a culvert runs at %s already", address)
		case errors.Is(err, syscall.EADDRINUSE):
			_, port, _ := net.SplitHostPort(address)
			d.add("port", address, checkFailed, fmt.Sprintf("end the other program, or use another port; find it with: ss -ltnp 'sport = :%s'", port), "another program has the port %s", address)
		default:
			hint := "use another address"
			var ce *cliError
			if errors.As(listenError(err), &ce) {
				hint = ce.hint
			}
			d.add("port", address, checkFailed, hint, "the port %s can't be opened: %s", address, err)
		}
	}
	if free > 0 {
		d.add("port", "", checkOK, "", "%s of the configuration can be opened", plural(free, "port"))
	}
}

// isCulvert reports whether a listener of culvert answers at an address: it says who it is to
// a request that it does not serve.
func isCulvert(address string) bool {
	c, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := io.WriteString(c, "PUT / HTTP/1.1\r\nHost: doctor.culvert.alt\r\n\r\n"); err != nil {
		return false
	}
	answer, _ := io.ReadAll(io.LimitReader(c, 4<<10))
	return bytes.Contains(answer, []byte("culvert: "))
}

// namespaces looks whether unprivileged users may make user namespaces, for culvert exec.
func (d *doctor) namespaces() {
	value := func(name string) string {
		data, err := os.ReadFile(filepath.Join(d.root, "proc/sys", name))
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(data))
	}
	const without = "; without it, culvert exec uses proxy variables in place of a namespace"
	switch most := value("user/max_user_namespaces"); {
	case most == "":
		d.add("userns", "", checkSkipped, "", "this system has no user namespaces, which culvert exec needs to capture a program")
	case most == "0":
		d.add("userns", "", checkWarning, "sysctl -w user.max_user_namespaces=15000"+without, "user namespaces are off, which culvert exec needs to capture a program")
	case value("kernel/unprivileged_userns_clone") == "0":
		d.add("userns", "", checkWarning, "sysctl -w kernel.unprivileged_userns_clone=1"+without, "user namespaces are for root alone, and culvert exec needs one to capture a program")
	case value("kernel/apparmor_restrict_unprivileged_userns") == "1":
		d.add("userns", "", checkWarning, "give culvert an AppArmor profile with userns, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"+without, "AppArmor restricts user namespaces, and culvert exec needs one to capture a program")
	default:
		d.add("userns", "", checkOK, "", "user namespaces can be made")
	}
}

// listRules returns what nft lists, as JSON.
func listRules(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, oneCheck)
	defer cancel()
	return exec.CommandContext(ctx, "nft", "-j", "list", "ruleset").Output()
}

// A ruleset is what nft lists.
type ruleset struct {
	Nftables []struct {
		Chain *struct {
			Family, Table, Name, Type, Hook string
			Prio                            int
			Policy                          string
		}
		Rule *foreignRule
	}
}

// A foreignRule is a rule of nftables.
type foreignRule struct {
	Family, Table, Chain string
	Expr                 []map[string]json.RawMessage
}

// targets returns the chains that r leads to.
func (r *foreignRule) targets() (all []string) {
	for _, e := range r.Expr {
		for _, name := range []string{"jump", "goto"} {
			var to struct{ Target string }
			if json.Unmarshal(e[name], &to) == nil && to.Target != "" {
				all = append(all, to.Target)
			}
		}
	}
	return all
}

// rules looks for rules of others that take connections away before culvert's capture, or on
// the way to a gateway.
func (d *doctor) rules(ctx context.Context) {
	text, err := d.nft(ctx)
	if err != nil {
		d.add("nftables", "", checkSkipped, "", "the rules of nftables can't be listed: nft is not there, or may be used by root alone")
		return
	}
	var set ruleset
	if err := json.Unmarshal(text, &set); err != nil {
		d.add("nftables", "", checkSkipped, "", "nft lists its rules in a form that this culvert does not know")
		return
	}
	type chain struct{ family, table, name string }
	type hooked struct {
		hook string
		prio int
	}
	own := func(family, table string) bool { return family == "inet" && capture.IsTable(table) }
	limits := map[string]int{} // of culvert's first chain, by hook
	chains := map[chain]hooked{}
	for _, o := range set.Nftables {
		c := o.Chain
		if c == nil || c.Hook == "" {
			continue
		}
		if !own(c.Family, c.Table) {
			chains[chain{c.Family, c.Table, c.Name}] = hooked{c.Hook, c.Prio}
		} else if limit, ok := limits[c.Hook]; !ok || c.Prio < limit {
			limits[c.Hook] = c.Prio
		}
	}
	// Chains that others lead to come when those do.
	for changed := true; changed; {
		changed = false
		for _, o := range set.Nftables {
			r := o.Rule
			if r == nil {
				continue
			}
			from, ok := chains[chain{r.Family, r.Table, r.Chain}]
			for _, target := range r.targets() {
				to := chain{r.Family, r.Table, target}
				if at, known := chains[to]; ok && (!known || from.prio < at.prio) {
					chains[to], changed = from, true
				}
			}
		}
	}
	found := map[chain]bool{}
	for _, o := range set.Nftables {
		r := o.Rule
		if r == nil {
			continue
		}
		k := chain{r.Family, r.Table, r.Chain}
		at, ok := chains[k]
		if !ok || found[k] || at.hook != "output" && at.hook != "prerouting" {
			continue
		}
		limit, ours := limits[at.hook]
		if !ours {
			limit = capture.Priority
		}
		verb := ""
		for _, e := range r.Expr {
			for name, what := range map[string]string{"redirect": "redirects", "dnat": "redirects", "tproxy": "redirects", "drop": "drops", "reject": "refuses"} {
				if _, ok := e[name]; ok {
					verb = what
				}
			}
		}
		if verb == "" || verb == "redirects" && at.prio > limit {
			continue
		}
		found[k] = true
		d.add("nftables", r.Table, checkWarning, fmt.Sprintf("see it with: nft list chain %s %s %s; have it leave out culvert's addresses and gateways, or give it a priority above %d", r.Family, r.Table, r.Chain, limit),
			"chain %s of table %s %s, which comes before culvert's rules in %s, %s connections", r.Chain, r.Family, r.Table, at.hook, verb)
	}
	if len(found) == 0 {
		d.add("nftables", "", checkOK, "", "no rule of others comes before culvert's in nftables")
	}
}
