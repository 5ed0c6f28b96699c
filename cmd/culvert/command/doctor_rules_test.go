package command

import (
	"context"
	"slices"
	"strings"
	"testing"
)

// Rules of others are told from culvert's own by family and name, and by their place.
func TestDoctorTellsRulesApart(t *testing.T) {
	const own = `{"chain":{"family":"inet","table":"culvert-work","name":"output","type":"nat","hook":"output","prio":-101}},
{"rule":{"family":"inet","table":"culvert-work","chain":"output","expr":[{"redirect":{"port":1}}]}},
{"chain":{"family":"inet","table":"culvert-work","name":"datagrams","type":"filter","hook":"output","prio":0}},
{"rule":{"family":"inet","table":"culvert-work","chain":"datagrams","expr":[{"reject":null}]}}`
	chain := func(family, table, name, hook, prio string) string {
		return `,{"chain":{"family":"` + family + `","table":"` + table + `","name":"` + name + `","type":"nat","hook":"` + hook + `","prio":` + prio + `}}`
	}
	rule := func(family, table, chain, expr string) string {
		return `,{"rule":{"family":"` + family + `","table":"` + table + `","chain":"` + chain + `","expr":[` + expr + `]}}`
	}
	const redirect = `{"redirect":{"port":15001}}`
	for name, test := range map[string]struct {
		rules string
		want  []string // chains that are named
	}{
		"own alone":                        {"", nil},
		"after ours":                       {chain("ip", "nat", "OUTPUT", "output", "-100") + rule("ip", "nat", "OUTPUT", redirect), nil},
		"before ours":                      {chain("ip", "nat", "OUT", "output", "-110") + rule("ip", "nat", "OUT", redirect), []string{"chain OUT of table ip nat"}},
		"before ours, by a jump":           {chain("ip", "mesh", "out", "output", "-110") + rule("ip", "mesh", "out", `{"jump":{"target":"to_proxy"}}`) + rule("ip", "mesh", "to_proxy", redirect), []string{"chain to_proxy of table ip mesh"}},
		"before ours, by a goto of a goto": {chain("ip", "mesh", "out", "output", "-110") + rule("ip", "mesh", "b", redirect) + rule("ip", "mesh", "a", `{"goto":{"target":"b"}}`) + rule("ip", "mesh", "out", `{"goto":{"target":"a"}}`), []string{"chain b of table ip mesh"}},
		"chains in a circle":               {chain("ip", "mesh", "out", "output", "-110") + rule("ip", "mesh", "out", `{"jump":{"target":"a"}}`) + rule("ip", "mesh", "a", `{"jump":{"target":"out"}}`), nil},
		"no chain leads there":             {rule("ip", "mesh", "unused", redirect), nil},
		"a name like ours":                 {chain("ip", "culvert", "output", "output", "-110") + rule("ip", "culvert", "output", redirect), []string{"chain output of table ip culvert"}},
		"a name that begins like ours":     {chain("inet", "culvertish", "o", "output", "-110") + rule("inet", "culvertish", "o", redirect), []string{"chain o of table inet culvertish"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := &doctor{nft: func(context.Context) ([]byte, error) { return []byte(`{"nftables":[` + own + test.rules + `]}`), nil }}
			d.rules(t.Context())
			var named []string
			for _, c := range d.report.Checks {
				if c.State != checkOK {
					named = append(named, c.Text)
				}
			}
			if !slices.EqualFunc(named, test.want, strings.HasPrefix) {
				t.Errorf("named %q, want %q", named, test.want)
			}
		})
	}
}
