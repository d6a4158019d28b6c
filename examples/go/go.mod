module sageattn

go 1.19
